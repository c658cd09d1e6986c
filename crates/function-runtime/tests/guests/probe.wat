;; The first byte of the path selects the behaviour:
;; e echo, s spin, r recursion, m memory flood, t table flood, u trap, b response out of bounds,
;; g response of 11 MiB, n invalid response.
(module
  (memory (export "memory") 1)
  (table $table 1 funcref)
  (global $out (mut i32) (i32.const 0))
  (data (i32.const 16) "200\n\n")
  (func (export "jiffy_buf") (param $length i32) (result i32)
    (drop (memory.grow (i32.add (i32.shr_u (local.get $length) (i32.const 16)) (i32.const 1))))
    (i32.const 65536))
  (func $deeper (param i32) (result i32)
    (i32.add (call $deeper (i32.add (local.get 0) (i32.const 1))) (i32.const 1)))
  (func (export "jiffy_handle") (param $at i32) (param $length i32) (result i32)
    (local $what i32)
    (local $i i32)
    (local.set $what
      (i32.load8_u (i32.add (local.get $at)
        (select (i32.const 6) (i32.const 5)
          (i32.eq (i32.load8_u (local.get $at)) (i32.const 80))))))
    (if (i32.eq (local.get $what) (i32.const 101)) ;; e: everything behind the empty line
      (then
        (local.set $i (local.get $at))
        (loop $next
          (local.set $i (i32.add (local.get $i) (i32.const 1)))
          (br_if $next (i32.ne (i32.load16_u (local.get $i)) (i32.const 0x0a0a))))
        ;; "200" before the two line feeds
        (i32.store8 (i32.sub (local.get $i) (i32.const 3)) (i32.const 50))
        (i32.store8 (i32.sub (local.get $i) (i32.const 2)) (i32.const 48))
        (i32.store8 (i32.sub (local.get $i) (i32.const 1)) (i32.const 48))
        (global.set $out (i32.sub (local.get $i) (i32.const 3)))
        (return (i32.sub (i32.add (local.get $at) (local.get $length)) (global.get $out)))))
    (if (i32.eq (local.get $what) (i32.const 115)) ;; s
      (then (loop $forever (br $forever))))
    (if (i32.eq (local.get $what) (i32.const 114)) ;; r
      (then (drop (call $deeper (i32.const 0)))))
    (if (i32.eq (local.get $what) (i32.const 109)) ;; m
      (then
        (loop $grow
          (br_if $grow (i32.ne (memory.grow (i32.const 64)) (i32.const -1))))
        (unreachable)))
    (if (i32.eq (local.get $what) (i32.const 116)) ;; t
      (then
        (loop $grow
          (br_if $grow
            (i32.ne (table.grow $table (ref.null func) (i32.const 1000)) (i32.const -1))))
        (unreachable)))
    (if (i32.eq (local.get $what) (i32.const 117)) ;; u
      (then (unreachable)))
    (if (i32.eq (local.get $what) (i32.const 98)) ;; b
      (then (global.set $out (i32.const -8)) (return (i32.const 64))))
    (if (i32.eq (local.get $what) (i32.const 103)) ;; g
      (then (return (i32.const 11534336))))
    (if (i32.eq (local.get $what) (i32.const 110)) ;; n
      (then (return (i32.const 8))))
    (global.set $out (i32.const 16))
    (i32.const 5))
  (func (export "jiffy_out") (result i32) (global.get $out)))
