  ;; Items of a module that searches all of its state for marks of other requests, and leaves its own.
  ;; Words in braces are parameters of its shape (traces/trace_guest.rs).
  (type $number (func (result i32)))
  (table $table {elements} funcref)
  (table $other 1 funcref)
  (global $found (mut i32) (i32.const 0))
  (global $i32 (mut i32) (i32.const {number}))
  (global $i64 (mut i64) (i64.const {number}))
  (global $f32 (mut f32) (f32.const {number}))
  (global $f64 (mut f64) (f64.const {number}))
  (global $v128 (mut v128) (v128.const i64x2 {number} {number}))
  (global $funcref (mut funcref) (ref.func $own))
  (global $null (mut funcref) (ref.null func))
  (func $own (type $number) (i32.const {number}))
  (func $marker (type $number) (i32.const -1))
  (elem declare func $marker)
  (elem (table $table) (i32.const {first-element}) func {functions})
  {data}

  ;; Adds to the set of found marks: 1 memory, 2 data, 4 globals, 8 tables, 16 sizes.
  (func $find (param $kind i32) (param $is-found i32)
    (if (local.get $is-found)
      (then (global.set $found (i32.or (global.get $found) (local.get $kind))))))
  (func $zeros (param $at i32) (param $end i32) (local $seen v128)
    (block $done (loop $next
      (br_if $done (i32.ge_u (local.get $at) (local.get $end)))
      (local.set $seen (v128.or (local.get $seen) (v128.load (local.get $at))))
      (local.set $at (i32.add (local.get $at) (i32.const 16)))
      (br $next)))
    (call $find (i32.const 1) (v128.any_true (local.get $seen))))
  (func $data (param $at i32) (param $end i32) (param $expected i64) (local $sum i64)
    (loop $next
      (local.set $sum (i64.mul (i64.const 0x100000001b3)
        (i64.xor (local.get $sum) (i64.load (local.get $at)))))
      (local.set $at (i32.add (local.get $at) (i32.const 8)))
      (br_if $next (i32.lt_u (local.get $at) (local.get $end))))
    (call $find (i32.const 2) (i64.ne (local.get $sum) (local.get $expected))))
  (func $globals
    (call $find (i32.const 4) (i32.ne (global.get $i32) (i32.const {number})))
    (call $find (i32.const 4) (i64.ne (global.get $i64) (i64.const {number})))
    (call $find (i32.const 4) (f32.ne (global.get $f32) (f32.const {number})))
    (call $find (i32.const 4) (f64.ne (global.get $f64) (f64.const {number})))
    (call $find (i32.const 4) (v128.any_true
      (v128.xor (global.get $v128) (v128.const i64x2 {number} {number}))))
    (call $find (i32.const 4) (i32.eqz (ref.is_null (global.get $null))))
    (call $find (i32.const 8) (i32.eqz (ref.is_null (table.get $other (i32.const 0)))))
    (table.set $other (i32.const 0) (global.get $funcref))
    (call $find (i32.const 4)
      (i32.ne (call_indirect $other (type $number) (i32.const 0)) (i32.const {number}))))
  (func $is-own (param $element i32) (result i32)
    (if (ref.is_null (table.get $table (local.get $element))) (then (return (i32.const 0))))
    (i32.eq (call_indirect $table (type $number) (local.get $element)) (i32.const {number})))
  ;; All elements: elements of the module, and null.
  (func $elements (local $i i32)
    (call $find (i32.const 16)
      (i32.ne (table.grow $table (ref.null func) (i32.const 5)) (i32.const {elements})))
    (loop $next
      (if (i32.lt_u (i32.sub (local.get $i) (i32.const {first-element})) (i32.const {own-elements}))
        (then (call $find (i32.const 8) (i32.eqz (call $is-own (local.get $i)))))
        (else (call $find (i32.const 8)
          (i32.eqz (ref.is_null (table.get $table (local.get $i)))))))
      (local.set $i (i32.add (local.get $i) (i32.const 1)))
      (br_if $next (i32.lt_u (local.get $i) (table.size $table)))))
  (func $look
    (call $find (i32.const 16)
      (i32.ne (memory.grow (i32.const {grown})) (i32.const {pages})))
    {ranges}
    (call $globals)
    (call $elements))

  ;; Leaves marks in globals, tables, and memory from {keep} on: everywhere (a), or in a tenth (0 to
  ;; 9) of it in one page.
  (func $mark (param $place i32) (local $size i32)
    (global.set $i32 (i32.const -{number}))
    (global.set $i64 (i64.const -{number}))
    (global.set $f32 (f32.const -{number}))
    (global.set $f64 (f64.const -{number}))
    (global.set $v128 (v128.const i64x2 -{number} -{number}))
    (global.set $funcref (ref.func $marker))
    (global.set $null (ref.func $marker))
    (table.set $other (i32.const 0) (ref.func $marker))
    (table.fill $table (i32.const 0) (ref.func $marker) (table.size $table))
    (local.set $size (i32.sub (i32.shl (memory.size) (i32.const 16)) (i32.const {keep})))
    (if (i32.eq (local.get $place) (i32.const 97))
      (then (memory.fill (i32.const {keep}) (i32.const {mark}) (local.get $size)))
      (else (memory.fill
        (i32.add (i32.const {keep}) (i32.mul (i32.sub (local.get $place) (i32.const 48))
          (i32.div_u (local.get $size) (i32.const 10))))
        (i32.const {mark}) (i32.const 4096)))))
  ;; Ends as selected by the path: t by a trap, s never, w after a while.
  (func $end (param $kind i32) (local $i i32)
    (if (i32.eq (local.get $kind) (i32.const 116)) (then (unreachable)))
    (if (i32.eq (local.get $kind) (i32.const 115)) (then (loop $forever (br $forever))))
    (if (i32.eq (local.get $kind) (i32.const 119)) (then
      (loop $next
        (local.set $i (i32.add (local.get $i) (i32.const 1)))
        (br_if $next (i32.lt_u (local.get $i) (i32.const 1000000)))))))
