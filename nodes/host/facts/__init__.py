"""What is known of a loaded model before anything is put on it."""
