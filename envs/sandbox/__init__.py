"""Sandboxes that run code written by a policy, and the grader that judges it from outside."""
