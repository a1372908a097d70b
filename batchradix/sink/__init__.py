"""Results to files: committed shards while the job runs, one file in input order at the end."""
