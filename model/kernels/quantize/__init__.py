"""fp32 to MXFP4 and back."""
