"""The numerical side: payloads, codecs, merging, outer optimizers. Torch, but no I/O and no protocol."""
