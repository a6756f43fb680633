"""How many numbers share a scale, or a word; apart from `formats`, so that what only reads files imports no JAX."""

FP8_BLOCK = 128  # rows and columns, where an FP8 weight has scales of blocks
MX_BLOCK = 32  # columns
CODES_A_WORD = 4  # of MXFP4, as kernels read them
