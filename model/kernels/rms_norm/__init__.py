"""RMSNorm of rows, fp32."""
