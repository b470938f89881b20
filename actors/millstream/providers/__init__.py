"""What the answers of model providers say: throttled, out of quota, overloaded, broken, and how long to wait."""

from millstream.providers.classifying import Classified, classify
from millstream.providers.reading import Answer
from millstream.providers.usage import Usage

__all__ = ["Answer", "Classified", "Usage", "classify"]
