"""Parts for other people's programs, which do not use our launcher."""
