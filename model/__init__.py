"""NETWORK: the Mixture-of-Experts transformer, the MXFP4 format and weight snapshots."""
