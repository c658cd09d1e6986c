#![no_main]
//! Decrypted but hostile records of tables, and messages about tables of other members: a decoded
//! record is equal after encoding, and its rows belong to it.
//!
//! A *table* has the API keys or the template names of a fleet. It is stored in *parts*, selected
//! by a hash of the row's key. The *index* lists the last commits of all parts.

use jiffy_fleet::tables::{decode_answer, decode_request};
use jiffy_fleet_core::FleetId;
use jiffy_fleet_core::record::{RowKey, Table, TableIndex, TablePart};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let fleet = FleetId::try_from("7kq2".to_owned()).unwrap();
    for part in [RowKey::Key("a".to_owned()).part(), 0] {
        if let Ok(record) = TablePart::decode(data, &fleet, Table::Keys, part) {
            assert!(record.rows.iter().all(|row| row.key().part() == part));
            let bytes = record.encode().unwrap();
            let decoded = TablePart::decode(&bytes, &fleet, Table::Keys, part);
            assert_eq!(decoded, Ok(record));
        }
    }
    if let Ok(index) = TableIndex::decode(data, &fleet) {
        let decoded = TableIndex::decode(&index.encode().unwrap(), &fleet);
        assert_eq!(decoded, Ok(index));
    }
    let _ = decode_request(data, &fleet);
    let _ = decode_answer(data, &fleet);
});
