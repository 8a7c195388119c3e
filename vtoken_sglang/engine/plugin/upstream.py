"""sha256 of the SGLang 0.5.23 files that hooks attach to, or whose classes and functions are
extended or called where their inner workings matter: as in the released wheel, and as the series of
`patches/` leaves those that it changes."""

# ruff: noqa: E501

UPSTREAM_SHA256: dict[str, str] = {
    "srt/server_args.py": "fa41e6e4298eab15fd598179e4d85fb31ed815e57146f0be8f4d2761cdba08e8",
    "srt/entrypoints/engine.py": "d441ebdd8d2c2c6f44d8a3ad1390bfd9563766dc2c70f620f763597a838093f4",
    "srt/managers/data_parallel_controller.py": "fd3213b6fdeebba00ee4d0cf074f503d365ca388cbd06edc76d8d26c94695df9",
    "srt/managers/tokenizer_manager.py": "bc18c6a24cb43329d4180d7a90b58533684e0f7787deb93b71397ff5ef7c38ba",
    "srt/managers/scheduler.py": "cb8f6de62ad1e200df34114cbcffec747e16d667eddbc719ccb9052723e8b4e5",
    "srt/mem_cache/base_prefix_cache.py": "92dc72c5e34e1106c30b5692d3be5bdae52216cc8689ef951bcf4b10d80ccbf7",
    "srt/mem_cache/memory_pool.py": "e077773e25c02be4dc597741e5f987375a221e595bccf92997dea684d5445a26",
    "srt/layers/attention/torch_native_backend.py": "5da07edadf56f4f4e4b8319ed48216b5a8ddb989224d3e95011b76800bf9926b",
    "srt/layers/attention/attention_registry.py": "065f329ad66dcffa56afdbd53ee4bf7e9aad15d695d399bcfa452a907ac5281d",
    "srt/plugins/hook_registry.py": "0144d8c3e5ee294322894f88b8ad3bd49edad15c124650e4e834d0366815dc7d",
    "srt/managers/scheduler_components/invariant_checker.py": "c3beba8c7b1e5682c0731ca389db0868804de2a08139ac50f0abec63c7a3354e",
    "srt/managers/schedule_policy.py": "51e4f0f5f1e7370de34a23643b426367137bba8d28a5c39e7ec81bfb852b2401",
    "srt/managers/utils.py": "92d769c6aa566282f01704a709fe47b880ea286fdcb14d1ad2625920d083c32e",
    "srt/mem_cache/allocator/base.py": "17c07a9ab32c62932048d3579e620eaa2e2558b03b828df152b2ee953c4bfe32",
    "srt/mem_cache/kv_index_translator.py": "9656087011e90f4a166f69725ce1b9d9f4bab80aba2e44969aa48ebacf4b784a",
    "srt/mem_cache/radix_cache.py": "eea7015fcf678167ac7296b08c8dc568ccbe42a4bb106da23b33a7c59debec01",
    "srt/mem_cache/unified_radix_cache.py": "9c1a1116081c266301ecfeef4faf4178d18114a8996010765d9aa238cd83deb3",
    "srt/mem_cache/prefill_budget.py": "b1d64e648d958aeb82fe60c8acacbe9ecd4d0c83ca2ea8a058eaaaf0b488e07e",
    "srt/mem_cache/common.py": "59e2b5ce9902f7633bdcad54bd57e2e98d546b0c97cfc2e9de560c511e13ad81",
    "srt/mem_cache/allocator/paged.py": "c72f28d9c5b953a05fcc0a0451307ecdbfbfb756eca3f0073f7be3eb737d38f6",
    "srt/mem_cache/allocator/token.py": "ee09d0021b69b111e3262811e2fdaf2f495ecfc2cf6ed142070a7f7e95a030ec",
    "srt/layers/attention/flashinfer_backend.py": "24caf1c0acd05835de9bbb8d95b027f2b09dccffc5701680c5ae11a48f5f8da6",
    "srt/layers/attention/triton_backend.py": "2e095cfafcd30ad0e720fd1ecd70c92f1a83f47a86a28da0ab739ab5717100aa",
    "srt/layers/radix_attention.py": "7d04b60884d94c03cd43aeb04af3e9a57b6a068faf7378311d4ecc960260ac69",
    "srt/managers/tp_worker.py": "1e4b9d76c83e640a5d9a774a13e7a546df4537f89511f2ab74410a0ec86c43dd",
    "srt/managers/schedule_batch.py": "0e66c8af3cd653e7db646f31c02219587afc6c617311b72c4e286307b97e68a7",
    "srt/managers/scheduler_components/pool_stats_observer.py": "589867e574c3ff98212b4e9a966edcca7bc86054da866f0c2012040d60bd41e7",
    "srt/mem_cache/kv_loc_plan.py": "2afcf4d67e2265f3726c3ce4c26f7ed4c1188272712e1872cf9cf14d97aa876a",
    "srt/model_executor/forward_batch_info.py": "9a7df5e3994b50ad519efc09c532bba4f8a6f26c36f764de64811d32b05f9744",
}

PATCHED_SHA256: dict[str, str] = {
    "srt/managers/scheduler.py": "f90f78b34628aca7b612664395c7c8835e9232f7d401601891ef2858d5858c10",
    "srt/managers/scheduler_components/pool_stats_observer.py": "8db82ef022cf7987403177fa843be664e9f053f00eadc1dabc5feddd0dd26132",
    "srt/mem_cache/kv_loc_plan.py": "bd48bdf30a8ae74bda26213bc50a996ba52860988f32057d95e278d19372d7ac",
    "srt/model_executor/forward_batch_info.py": "cab27f8fe37aa711ab23e5e593d0a53244a823eae3401868fc8c1957b36b046b",
}
