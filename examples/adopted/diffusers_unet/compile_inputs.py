"""What matrix/default.yaml compiles is called with this."""

from diffusers import UNet2DModel


def model():
    """UNet2DModel of diffusers, with random weights; nothing is downloaded."""
    return UNet2DModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=('DownBlock2D', 'AttnDownBlock2D'),
        up_block_types=('AttnUpBlock2D', 'UpBlock2D'),
        attention_head_dim=8,
    )
# written by pytest-torchcompile, b6dafd60bd36: without this line, or edited, the file is yours
