"""Tasks: prompts to train on, held-out prompts to judge by, and rewards as plain functions."""
