"""Pallas-Triton kernels of the norm-before-weight MoE block: plain arrays in, arrays out."""
