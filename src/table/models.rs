//! loom models of the bucket word.
