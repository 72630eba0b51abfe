"""Dense products with weights that are published in bf16."""
