"""What is going on: facts read from the bucket, status derived from them, text for people."""
