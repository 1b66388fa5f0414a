"""A worker's Prometheus metrics: of its engine, of finished requests, of its GPUs, and where they are served.

Counters that the engine has anyway are read when somebody asks; what is known of one request is counted when
its result has been written. Nothing is done within a step.
"""
