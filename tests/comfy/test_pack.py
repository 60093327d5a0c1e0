"""The pack as ComfyUI sees it."""


def test_every_node_is_registered(server):
    info = server.get("/object_info")
    ours = {name for name in info if name.startswith("SFGRPO_")}
    assert ours == {"SFGRPO_FlowSigmas", "SFGRPO_SDESampler"}
    assert "Traceback" not in server.log()
