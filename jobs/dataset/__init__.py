"""Make a dataset out of a dataset: read rows, render prompts, run them, write what came back."""
