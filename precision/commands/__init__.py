"""What ``python -m halfsafe`` runs: inspect, scan, convert, plan, doctor."""
