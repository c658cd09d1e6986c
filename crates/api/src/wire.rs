//! Wire types: conversion of the daemon's records to the bodies of API responses, and of request
//! bodies to the daemon's types. The submodules have one kind of object each.

use jiffy_api_types::Moment;

pub(crate) mod build;
pub(crate) mod comparison;
pub(crate) mod event;
pub(crate) mod function;
pub(crate) mod guest;
pub(crate) mod image_template;
pub(crate) mod key;
pub(crate) mod lineage;
pub(crate) mod sandbox;
pub(crate) mod secret;
pub(crate) mod snapshot;
pub(crate) mod template;
pub(crate) mod volume;
pub(crate) mod webhook;

/// Formats `ms` since 1970 as RFC 3339.
pub fn moment(ms: u64) -> Moment {
    // Times beyond the range of the formatter become its maximum.
    let ms = i64::try_from(ms).unwrap_or(i64::MAX);
    let time = jiff::Timestamp::from_millisecond(ms).unwrap_or(jiff::Timestamp::MAX);
    Moment(time.to_string())
}
