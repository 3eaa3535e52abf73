"""Models in the Hugging Face format."""
