"""Where rows already live: Hugging Face datasets, Polars frames, Arrow streams."""
