"""Token shards in a folder or a bucket: made of text, and read at any position in constant memory."""
