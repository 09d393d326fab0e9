"""The models that the workflows name: their folder in `models/` and where they are, as in ComfyUI's own templates (0.11.27; of Qwen-Image 2.1 0.11.97).

Qwen-Image 2.1 is newer than the ComfyUI that the workflows are written with.
"""

from __future__ import annotations

WAN21, WAN22 = "Comfy-Org/Wan_2.1_ComfyUI_repackaged", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
QWEN, KREA, H3, Z_IMAGE = (
    "Comfy-Org/Qwen-Image_ComfyUI",
    "Comfy-Org/Krea-2",
    "Comfy-Org/MiniMax-H3",
    "Comfy-Org/z_image_turbo",
)
QWEN_21, PIXEL_ART = "Comfy-Org/Qwen-Image-2.1", "tarn59/pixel_art_style_lora_z_image_turbo"
FLUX_TEXT, LUMINA = "comfyanonymous/flux_text_encoders", "Comfy-Org/Lumina_Image_2.0_Repackaged"


def _model(
    repository: str, folder: str, name: str, within: str = "split_files/{folder}/"
) -> tuple[str, tuple[str, str]]:
    return name, (folder, f"https://huggingface.co/{repository}/resolve/main/{within.format(folder=folder)}{name}")


FILES = dict((
    _model(WAN21, "diffusion_models", "wan2.1_t2v_1.3B_fp16.safetensors"),
    _model(WAN21, "diffusion_models", "wan2.1_t2v_1.3B_bf16.safetensors"),
    _model(WAN21, "text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors"),
    _model(WAN21, "vae", "wan_2.1_vae.safetensors"),
    _model(WAN22, "diffusion_models", "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors"),
    _model(WAN22, "diffusion_models", "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors"),
    _model(QWEN, "diffusion_models", "qwen_image_fp8_e4m3fn.safetensors"),
    _model(QWEN, "text_encoders", "qwen_2.5_vl_7b_fp8_scaled.safetensors"),
    _model(QWEN, "vae", "qwen_image_vae.safetensors"),
    _model(Z_IMAGE, "diffusion_models", "z_image_turbo_bf16.safetensors"),
    _model(Z_IMAGE, "text_encoders", "qwen_3_4b.safetensors"),
    _model(LUMINA, "vae", "ae.safetensors"),
    _model(PIXEL_ART, "loras", "pixel_art_style_z_image_turbo.safetensors", ""),
    _model(QWEN_21, "diffusion_models", "qwen_image_2.1_int8_convrot.safetensors", "{folder}/"),
    _model(QWEN_21, "text_encoders", "qwen3vl_8b_int8_convrot.safetensors", "{folder}/"),
    _model(QWEN_21, "vae", "qwen_image_2.1_vae_bf16.safetensors", "{folder}/"),
    _model("Comfy-Org/flux1-dev", "diffusion_models", "flux1-dev.safetensors", ""),
    _model(FLUX_TEXT, "text_encoders", "clip_l.safetensors", ""),
    _model(FLUX_TEXT, "text_encoders", "t5xxl_fp16.safetensors", ""),
    _model(KREA, "diffusion_models", "krea2_turbo_fp8_scaled.safetensors", "{folder}/"),
    _model(KREA, "text_encoders", "qwen3vl_4b_fp8_scaled.safetensors", "{folder}/"),
    _model(H3, "diffusion_models", "minimax_h3_fl2va_pruned_int8_convrot.safetensors", "{folder}/"),
    _model(H3, "text_encoders", "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", "{folder}/"),
    _model(H3, "vae", "minimax_h3_video_vae_fp16.safetensors", "{folder}/"),
    _model(H3, "vae", "minimax_h3_audio_vae_fp32.safetensors", "{folder}/"),
))  # fmt: skip

NEWER_NODES = dict.fromkeys(("TextEncodeQwenImage21", "QwenImage21Cache"), "0.37.2")
"""Node type -> the ComfyUI that its template asks for, where that is newer than what a workflow needs otherwise."""
