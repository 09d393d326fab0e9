"""Which layers of a model survive a lower precision, and which storage and compute suit a model on this device.

Imports the plans, the report's drawing and what lies below them; neither the guard nor the commands.
"""
