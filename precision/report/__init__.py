"""The report: its schema, text and pictures, and two images compared.

May import every room of the core below it: ``base`` to ``plan``.
"""
