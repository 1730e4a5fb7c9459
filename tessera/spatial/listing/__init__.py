"""The grammar of listings: what they are made of, printing, reading, and the file that holds one with its data."""

from tessera.spatial.listing.container import ChainedProgram, Program, load, save
from tessera.spatial.listing.parse import parse
from tessera.spatial.listing.text import print_listing, print_page

__all__ = ["ChainedProgram", "Program", "load", "parse", "print_listing", "print_page", "save"]
