"""Measurements that README and docs quote; each module is a command: `python -m benchmarks.NAME`."""
