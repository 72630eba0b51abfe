"""THE WORLD: environments, their tasks and the sandboxes they run code in."""
