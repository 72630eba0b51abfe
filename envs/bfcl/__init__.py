"""BFCL multi-turn: stateful APIs from the package `bfcl-eval`, called as tools and graded by the state they leave."""
