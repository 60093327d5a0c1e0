import pytest

from tests.rewards.small import save_clip


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory):
    """A folder with a small CLIP model and its tokenizer."""
    folder = tmp_path_factory.mktemp("clip")
    save_clip(folder)
    return folder
