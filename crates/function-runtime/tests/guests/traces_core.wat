;; Module of jiffy-core/1 around the items of traces.wat. The path has two letters: the kind of end,
;; and the position of the marks.
(module
  (memory (export "memory") {pages})
  {items}
  (func (export "jiffy_buf") (param i32) (result i32) (i32.const {buffer}))
  (func (export "jiffy_handle") (param $at i32) (param $length i32) (result i32)
    (local $kind i32) (local $place i32)
    (local.set $kind (i32.load8_u offset=5 (local.get $at)))
    (local.set $place (i32.load8_u offset=6 (local.get $at)))
    ;; Other requests may leave only their message.
    (memory.fill (local.get $at) (i32.const 0) (local.get $length))
    (call $look)
    (call $mark (local.get $place))
    (call $end (local.get $kind))
    ;; 200, two line feeds.
    (i64.store (i32.const 0) (i64.const 0x0a0a303032))
    (i32.store8 (i32.const 5) (i32.add (i32.const 64) (global.get $found)))
    (i32.store8 (i32.const 6) (i32.const {digit}))
    (i32.const 7))
  (func (export "jiffy_out") (result i32) (i32.const 0)))
