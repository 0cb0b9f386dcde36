"""What a rollout leaves behind for the trainer, and the packed weights both run from."""
