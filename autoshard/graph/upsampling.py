"""The operators that resize images, and over how many last dims: the last number in their names."""

NAMES = (
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d",
)  # fmt: skip
UPSAMPLED = {name: int(name.removesuffix("_aa")[-2]) for name in NAMES}
