"""Tell what ran: the report, its badge, its live copy on the page, and the routes of the page.

May import every room of the host but ``study``, which alone imports it.
"""
