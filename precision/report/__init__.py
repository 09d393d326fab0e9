"""The report: its schema, text and pictures."""
