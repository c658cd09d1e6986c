;; Answers "dirty" if its memory contains marks of an earlier request, then marks 64 KiB.
(module
  (memory (export "memory") 2)
  (global $out (mut i32) (i32.const 0))
  (data (i32.const 0) "200\n\nclean")
  (data (i32.const 16) "200\n\ndirty")
  (func (export "jiffy_buf") (param i32) (result i32) (i32.const 1024))
  (func (export "jiffy_handle") (param i32 i32) (result i32)
    (local $at i32) (local $seen i64)
    (local.set $at (i32.const 65536))
    (loop $next
      (local.set $seen (i64.or (local.get $seen) (i64.load (local.get $at))))
      (local.set $at (i32.add (local.get $at) (i32.const 8)))
      (br_if $next (i32.lt_u (local.get $at) (i32.const 131072))))
    (if (i64.ne (local.get $seen) (i64.const 0)) (then (global.set $out (i32.const 16))))
    (memory.fill (i32.const 65536) (i32.const 90) (i32.const 65536))
    (i32.const 10))
  (func (export "jiffy_out") (result i32) (global.get $out)))
