"""The profile of a job: how its latencies and lengths spread, its rates over time, and its errors by kind."""
