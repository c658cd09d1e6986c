//! Guests that search all of their state for marks of other requests: memory from its first byte,
//! including grown memory, data, globals, and each element of tables. Components also search
//! handles and the environment. Guests then leave their own marks there.
//!
//! All guests differ in sizes, data and marks, so that a slot's contents change when another guest
//! reuses it.
//!
//! A *slot* is address space for the memory of one instance, which requests use one after the
//! other.

use crate::support::TRACES;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

const CORE: &str = include_str!("../guests/traces_core.wat");
const HTTP: &str = include_str!("../guests/traces_http.wat");
/// Bytes at the start of a component's memory that the answer requires. They are marked last.
const KEPT_BYTES: u32 = 2048;
const PAGE_BYTES: u32 = 64 << 10;

/// Sizes of a guest. Addresses and lengths of data are multiples of 16.
struct Shape {
    pages: u32,
    /// Number of pages by which memory grows.
    grown: u32,
    /// Number of elements in the table.
    elements: u32,
    /// Elements that the module initializes.
    own_elements: Range<u32>,
    /// Address and length of each segment, in ascending order.
    data: &'static [(u32, u32)],
    /// Address of the request buffer, which contains no data segment.
    buffer: u32,
}

/// Returns the sizes of a guest. `memory` has the initial pages and the pages by which it grows.
/// `table` has the number of elements, and the elements that the module initializes.
const fn shape(
    memory: (u32, u32),
    table: (u32, Range<u32>),
    data: &'static [(u32, u32)],
    buffer: u32,
) -> Shape {
    Shape {
        pages: memory.0,
        grown: memory.1,
        elements: table.0,
        own_elements: table.1,
        data,
        buffer,
    }
}

/// Sizes of each guest: memories and tables below and above the size that resets retain, large
/// images at both ends of the memory, and no images.
const SHAPES: [Shape; FUNCTIONS] = [
    shape((1, 3), (10, 0..0), &[], 1024),
    shape((2, 0), (64, 3..11), &[(0, 4096)], 8192),
    shape((4, 4), (1, 0..1), &[(65_536, 16), (262_128, 16)], 0),
    shape((8, 0), (300, 290..300), &[(4096, 102_400)], 512),
    shape(
        (3, 1),
        (2000, 9..60),
        &[(1024, 1024), (100_000, 64)],
        65_536,
    ),
    shape(
        (16, 0),
        (40, 0..40),
        &[(32, 16), (70_000, 16), (262_144, 4096), (1_048_560, 16)],
        200_000,
    ),
    shape((1, 0), (9000, 8990..9000), &[(8192, 57_344)], 4096),
    shape((6, 2), (5, 2..3), &[(393_200, 16)], 131_072),
];

/// Number of guests.
pub const FUNCTIONS: usize = 8;

/// Guest by its number, starting at 1.
#[derive(Debug, Clone, Copy)]
pub struct TraceGuest(pub usize);

impl TraceGuest {
    pub fn all() -> impl Iterator<Item = Self> {
        (1..=FUNCTIONS).map(Self)
    }

    /// Returns the name of its function.
    pub fn name(self) -> String {
        format!("guest-{}", self.0)
    }

    /// Returns the environment variables: a common variable with a different value, and one of its
    /// own.
    pub fn environment(self) -> BTreeMap<String, String> {
        let name = self.name();
        let own = format!("OF_{}", self.0);
        BTreeMap::from([("GUEST".to_owned(), name.clone()), (own, name)])
    }

    /// Returns the start of the answer if no marks were found.
    pub fn clean(self) -> String {
        format!("@{}", self.0)
    }

    /// Returns the first byte of the answer if marks were found everywhere.
    pub fn marked(self) -> u8 {
        // The answer is `@` plus the sum of the found kinds: 1 memory, 2 data, 4 globals, 8 tables,
        // and 16 sizes.
        let no_data = u8::from(self.shape().data.is_empty());
        b'@' + 31 - no_data * 2
    }

    /// Returns the module of jiffy-core/1 in text form.
    pub fn core(self) -> Vec<u8> {
        self.fill(CORE, 0)
    }

    /// Returns the component of wasi:http/proxy in text form.
    pub fn component(self) -> Vec<u8> {
        self.fill(HTTP, KEPT_BYTES)
    }

    fn shape(self) -> &'static Shape {
        &SHAPES[self.0 - 1]
    }

    /// Returns a template with the numbers and definitions of this guest. `kept` is the value of
    /// `{keep}`.
    fn fill(self, template: &str, kept: u32) -> Vec<u8> {
        let shape = self.shape();
        let own = &shape.own_elements;
        let numbers = [
            ("{number}", u32::try_from(self.0).unwrap()),
            ("{digit}", u32::from(b'0') + u32::try_from(self.0).unwrap()),
            ("{mark}", 0x80 + u32::try_from(self.0).unwrap()),
            ("{pages}", shape.pages),
            ("{grown}", shape.grown),
            ("{elements}", shape.elements),
            ("{first-element}", own.start),
            ("{own-elements}", own.end - own.start),
            ("{buffer}", shape.buffer),
            ("{keep}", kept),
        ];
        let functions = "$own ".repeat((own.end - own.start).try_into().unwrap());
        let items = std::str::from_utf8(TRACES).unwrap();
        let mut text = template
            .replace("{items}", items)
            .replace("{functions}", &functions)
            .replace("{data}", &self.data())
            .replace("{ranges}", &self.ranges());
        for (word, number) in numbers {
            text = text.replace(word, &number.to_string());
        }
        text.into_bytes()
    }

    /// Returns the initial content of a range of memory. No byte is zero.
    fn bytes(self, at: u32, length: u32) -> impl Iterator<Item = u8> {
        let seed = self.0 * 37;
        (at..at + length).map(move |i| (seed + i as usize * 11) as u8 | 1)
    }

    /// Returns the definitions of the initial content.
    fn data(self) -> String {
        let mut text = String::new();
        for (at, length) in self.shape().data {
            let bytes = self.bytes(*at, *length);
            let escaped: String = bytes.map(|byte| format!("\\{byte:02x}")).collect();
            writeln!(text, "(data (i32.const {at}) \"{escaped}\")").unwrap();
        }
        text
    }

    /// Returns calls that check data and the ranges between.
    fn ranges(self) -> String {
        let shape = self.shape();
        let mut text = String::new();
        let zeros = |at: u32, end: u32, text: &mut String| {
            writeln!(text, "(call $zeros (i32.const {at}) (i32.const {end}))").unwrap();
        };
        let mut from = 0;
        for (at, length) in shape.data {
            let end = at + length;
            zeros(from, *at, &mut text);
            let digest = self.digest(*at, *length);
            let range = format!("(i32.const {at}) (i32.const {end})");
            writeln!(text, "(call $data {range} (i64.const {digest}))").unwrap();
            from = end;
        }
        zeros(from, (shape.pages + shape.grown) * PAGE_BYTES, &mut text);
        text
    }

    /// Returns the digest of a range, which the guest computes in the same way.
    fn digest(self, at: u32, length: u32) -> u64 {
        let bytes: Vec<u8> = self.bytes(at, length).collect();
        bytes.chunks_exact(8).fold(0u64, |sum, word| {
            // Like FNV-1a (with its prime number), but by words of eight bytes.
            (sum ^ u64::from_le_bytes(word.try_into().unwrap())).wrapping_mul(0x0100_0000_01b3)
        })
    }
}
