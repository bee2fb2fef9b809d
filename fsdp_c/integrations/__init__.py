"""fsdp_c inside other libraries; nothing here is imported unless asked for."""
