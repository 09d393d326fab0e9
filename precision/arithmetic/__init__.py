"""Multiply in fp16 without overflow: measure once, run the plan, look at the result; attention;
fp16 sums.

May import ``base`` alone.
"""
