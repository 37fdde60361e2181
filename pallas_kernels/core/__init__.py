"""What the ops, the library above them and the benchmarks share: files, results, tables, pictures and optional
packages."""
