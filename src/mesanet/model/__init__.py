"""The backbone around the mixers, its cache, generation, files, and the transformers wrapper."""
