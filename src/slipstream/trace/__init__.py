"""Readers: files of profiler traces in, a Recording of Timelines out."""
