"""The pack as ComfyUI sees it."""


def test_every_node_is_registered(server):
    info = server.get("/object_info")
    ours = {name for name in info if name.startswith("SFGRPO_")}
    assert ours == {
        "SFGRPO_FlowSigmas",
        "SFGRPO_JPEGSizeReward",
        "SFGRPO_LoRADoctor",
        "SFGRPO_LoadShapesDemo",
        "SFGRPO_RewardMix",
        "SFGRPO_SDESampler",
        "SFGRPO_ScoreImages",
        "SFGRPO_ShapesReward",
        "SFGRPO_TrainLoRA",
        "SFGRPO_TweediePreview",
    }
    # Later on other tests make mistakes on purpose.
    assert "Traceback" not in server.log().split("To see the GUI go to")[0]
