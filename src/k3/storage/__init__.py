"""How bytes come to memory. Knows files, offsets and classes of bytes; knows nothing of the model."""
