"""What an export consists of and was made from, as a CycloneDX ML-BOM."""
