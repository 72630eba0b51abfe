"""What a model costs in memory, loading and publishing, from its configuration; the program is `model/plan.py`."""
