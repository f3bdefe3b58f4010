"""Model arguments, read from Hugging Face configs."""
