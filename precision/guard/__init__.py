"""Find NaN and Inf, locate their origin, decide what runs wider, and give the verdict.

May import every room of the core below it: ``base`` to ``report``.
"""
