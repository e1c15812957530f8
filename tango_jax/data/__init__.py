"""Problems and tokenizers."""
